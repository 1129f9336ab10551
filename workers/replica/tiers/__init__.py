"""The tiers below one replica's page pool: host memory, a folder of files, and the thread that stores and loads."""
