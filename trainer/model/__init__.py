"""The student: load, initialise, attention, checkpointing of activations, adapters."""
