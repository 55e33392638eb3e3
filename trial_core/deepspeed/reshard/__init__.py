"""Restores DeepSpeed engines on another number of ranks, or with another ZeRO stage.

- `reshard_loader` is the entry: DeepSpeed loads through it, and asks it for each file.
- `saved_state` assembles a saved engine's state from the shards of all ranks.
- `parameter_state` is the optimizer's state of one parameter, and where ZeRO keeps it.
- `live_state` fills the state that this rank's live engine expects.
"""
