"""`crossdock tune`: what chunks of every size cost here, and the settings that follow."""
