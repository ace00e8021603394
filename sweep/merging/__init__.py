"""An adapter merged into its 16-bit base, shard by shard; `job` is the way in."""
