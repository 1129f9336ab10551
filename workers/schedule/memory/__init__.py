"""The pages of a pool: who owns them, which prefixes they hold, and which one is evicted next."""
