"""The demonstration, as far as it is started by hand. A door: the room is :mod:`pagedkv.serving.engine.demo`."""
