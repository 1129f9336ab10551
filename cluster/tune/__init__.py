"""`crossdock tune`: measure steps with chunks of every size on this machine, and recommend settings."""
