"""What tests and the development stack run on: an embedded Postgres, a Kafka broker, a clock that moves.

Never imported by a service.
"""
