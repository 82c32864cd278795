"""Hints whose length follows the success."""
