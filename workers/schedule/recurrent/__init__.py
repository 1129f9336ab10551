"""The states of recurrent layers: which pages hold states, and which prefixes keep one."""
