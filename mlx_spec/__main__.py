"""`python -m mlx_spec` is the command `mlx_spec`."""

import sys

from .cli import main

sys.exit(main())
