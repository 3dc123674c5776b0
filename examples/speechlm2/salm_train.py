"""Trains SALM from a Hydra configuration: ``python salm_train.py --config-path=DIR --config-name=NAME key=value``.

Hydra only composes the files; reading, checking and training are those of ``shoal train``. It runs by itself (and
starts one rank per device), under torchrun and under srun.
"""

import sys

import hydra
from omegaconf import DictConfig, OmegaConf

from shoal.cli import report_errors
from shoal.cli.train import train
from shoal.config import LoadOptions

# Hydra would move to a new folder and set up logging; the run's folder belongs to exp_manager.
QUIET = (
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
    "hydra/job_logging=disabled",
    "hydra/hydra_logging=disabled",
)


@hydra.main(version_base=None, config_path="conf", config_name="salm")
def main(config: DictConfig) -> None:
    """Trains and leaves with the exit status; 2 means that the configuration was refused."""
    data = OmegaConf.to_container(config, resolve=False)
    program = [__file__, *ARGUMENTS]
    sys.exit(report_errors("salm_train.py", lambda: train(data, options=LoadOptions(), program=program)))


if __name__ == "__main__":
    ARGUMENTS = sys.argv[1:]
    sys.argv += QUIET
    main()
