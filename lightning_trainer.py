"""Train or validate: `python3 lightning_trainer.py fit -c config.yaml` (`fit --help` lists every setting)."""

import sys

from trainer.cli import main

if __name__ == "__main__":
    sys.exit(main())
