"""Infrastructure shared by the services; it knows no business word and imports nothing of ours.

The invariant that the package protects: a change of state and the events that announce it are committed together,
and reach Kafka at least once, in order per message key.
"""
