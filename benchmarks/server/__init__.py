"""The server under load: what HTTP costs beside the engine, and what is left behind."""
