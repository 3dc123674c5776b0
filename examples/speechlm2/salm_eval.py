"""Measures the word error rate of a trained SALM on a manifest.

``python salm_eval.py pretrained_name=DIR inputs=MANIFEST`` is the same as
``shoal evaluate``; the fields are those of ``shoal.config.evaluate.EvaluateConfig``.
"""

import sys

from shoal.cli import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
