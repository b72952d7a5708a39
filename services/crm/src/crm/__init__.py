"""Deals and their timeline: what was asked for, by when, and whether it came."""
