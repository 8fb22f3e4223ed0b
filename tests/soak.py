"""Whether all is run: `make soak` does, `make test` runs a part."""

import os

WHOLE = os.environ.get("HOLDFAST_SOAK", "") not in ("", "0")
