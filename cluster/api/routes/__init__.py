"""Answer the paths of the API, one file for each."""
