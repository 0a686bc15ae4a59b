"""How collectives are made of messages, and what they cost on one and on many levels of network."""
