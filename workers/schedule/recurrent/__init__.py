"""The states of recurrent layers: which pages hold them, and which prefixes keep one."""
