"""The doors: delivery is what they share; amqp, mqtt and http are one door each."""
