"""Processes for work that could crash, hang or fill its caller: each answer comes from a child that has limits."""
