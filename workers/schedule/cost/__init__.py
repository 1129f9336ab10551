"""What a step takes, in seconds: the formula, and how its terms are learnt."""
