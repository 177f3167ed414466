"""Tests against other engines' own code, which is no part of the project: only `make test-peers` runs them."""

import os

collect_ignore_glob = [] if "PAGEDKV_PEERS" in os.environ else ["*"]
