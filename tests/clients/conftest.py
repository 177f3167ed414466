"""Coding agents of others, which are no part of the project: only `make test-clients` runs them."""

import os

collect_ignore_glob = [] if "PAGEDKV_CLIENTS" in os.environ else ["*"]
