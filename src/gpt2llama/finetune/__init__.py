"""Adapting a trained model: classes, instructions, preferences, rewards, a teacher."""
