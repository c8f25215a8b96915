"""``python -m prefect_cortex_training`` is ``prefect-cortex-training``."""

import sys

from prefect_cortex_training.command import main

sys.exit(main())
