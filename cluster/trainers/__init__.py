"""Adapters of trainers' frameworks that Crossdock serves without a change of theirs."""
