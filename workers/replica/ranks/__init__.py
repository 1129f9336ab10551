"""The ranks of one replica: their processes, the part of the model that each has, and their messages."""
