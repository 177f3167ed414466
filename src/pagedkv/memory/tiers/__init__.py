"""Tiers: stores of cached content below device memory, which never answer wrongly.

Reading order: ``identity`` (what content is), ``checksums`` and ``frame`` (how it is written, read and refused);
``index``, ``admission``, ``breaker``, ``config``, ``actions``, ``statistics`` and ``core`` (the decisions of a store,
without thread, clock and I/O); ``body`` and the bodies ``host_body``, ``folder_body``, ``redis_body`` and
``object_body`` (where bytes are kept); ``store`` (a core and a body on threads). This room knows no device, no model
and no engine.
"""
