"""The engine of one replica: schedule, execute, update; and the measured seconds of its steps."""
