"""Pictures in prompts: fetch them within limits, process them in other processes, and place them among the tokens."""
