"""How well a diagnosis fits what people saw in real logs, how much it can be fed, and what breaks it."""
