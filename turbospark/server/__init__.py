"""A server that speaks OpenAI's API. Knows HTTP and JSON; its model is a `Runner`."""
