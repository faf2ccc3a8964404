"""Small real models and data for the demo and the tests."""
