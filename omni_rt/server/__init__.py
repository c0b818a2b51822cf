"""HTTP: the OpenAI API over `AsyncOmni`. One file per resource."""
