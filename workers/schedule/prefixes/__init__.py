"""Prefixes that come from elsewhere: from tiers below the pool, or from another replica."""
