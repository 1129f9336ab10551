"""Read the fields of a request's body: what each may be, and what it asks for."""
