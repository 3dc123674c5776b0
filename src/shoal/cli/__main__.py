"""``python -m shoal.cli`` is the ``shoal`` command; torchrun starts ranks this way."""

import sys

from shoal.cli import main

sys.exit(main())
