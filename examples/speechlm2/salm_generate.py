"""Answers a manifest of conversations with a trained SALM.

``python salm_generate.py pretrained_name=DIR inputs=MANIFEST`` is the same as
``shoal generate``; the fields are those of ``shoal.config.evaluate.GenerateConfig``.
"""

import sys

from shoal.cli import main

if __name__ == "__main__":
    sys.exit(main(["generate", *sys.argv[1:]]))
