"""`python -m turbospark` is the `turbospark` command."""

import sys

from turbospark.cli import main

sys.exit(main())
