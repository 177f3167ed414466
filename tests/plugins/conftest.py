"""Ray's own deprecated calls are not ours to mend: it is imported here, where warnings are no errors."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray.serve.request_router  # noqa: F401 - so that later imports find it
