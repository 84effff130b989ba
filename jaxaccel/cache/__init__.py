"""What a model keeps between calls: keys and values, recurrent states."""
