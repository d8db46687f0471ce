"""The side that users see: text to token ids, and token ids back to text."""
