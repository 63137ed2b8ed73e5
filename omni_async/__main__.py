"""`python -m omni_async` is `omni-async`."""

from omni_async.cli.main import main

raise SystemExit(main())
