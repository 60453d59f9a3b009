"""From a trained model to one that answers, classifies or prefers."""
