"""The engine of one replica: schedule, execute, update; and what its steps are measured to take."""
