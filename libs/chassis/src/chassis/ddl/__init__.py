"""DDL of the tables that chassis keeps in every service's schema, frozen per revision: migrations call it alone.

What has been released is never edited: a change is a new module that a new migration calls.
"""
