"""Predict the seconds of a step: the formula, and how its terms are learnt."""
