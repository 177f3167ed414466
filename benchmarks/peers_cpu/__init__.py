"""The engine on a CPU beside vLLM's build for CPUs."""
