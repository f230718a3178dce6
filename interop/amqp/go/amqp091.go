// amqp091-go, the client that RabbitMQ's team keeps for Go. Speaks the lines of interop/client.py.
//
// Built with GO111MODULE=off from Debian's sources, so nothing is fetched.
package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"log"
	"os"
	"reflect"
	"strconv"
	"strings"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

const wait = 20 * time.Second

var stdin = bufio.NewReader(os.Stdin)

func check(holds bool, what string, values ...interface{}) {
	if !holds {
		log.Panicf("not so: "+what, values...)
	}
}

func must(problem error) {
	if problem != nil {
		log.Panic(problem)
	}
}

func connect(config amqp.Config) *amqp.Connection {
	connection, problem := amqp.DialConfig(os.Getenv("AMQP_URL"), config)
	must(problem)
	return connection
}

func open(connection *amqp.Connection) *amqp.Channel {
	channel, problem := connection.Channel()
	must(problem)
	return channel
}

func declare(channel *amqp.Channel, name string, durable, exclusive bool, arguments amqp.Table) string {
	queue, problem := channel.QueueDeclare(name, durable, false, exclusive, false, arguments)
	must(problem)
	return queue.Name
}

func publish(channel *amqp.Channel, exchange, key string, message amqp.Publishing) {
	must(channel.PublishWithContext(context.Background(), exchange, key, false, false, message))
}

func text(body string) amqp.Publishing {
	return amqp.Publishing{Body: []byte(body)}
}

func next(deliveries <-chan amqp.Delivery) amqp.Delivery {
	select {
	case delivery, open := <-deliveries:
		check(open, "the consumer is still there")
		return delivery
	case <-time.After(wait):
		log.Panic("a message did not come")
		panic("not reached")
	}
}

func consume(channel *amqp.Channel, queue string, autoAck bool) <-chan amqp.Delivery {
	deliveries, problem := channel.Consume(queue, "", autoAck, false, false, false, nil)
	must(problem)
	return deliveries
}

func confirms(connection *amqp.Connection) {
	channel := open(connection)
	must(channel.Confirm(false))
	declare(channel, "go.confirms", true, false, nil)
	var pending []*amqp.DeferredConfirmation
	for number := 0; number < 500; number++ {
		message := amqp.Publishing{Body: []byte(strconv.Itoa(number)), DeliveryMode: amqp.Persistent}
		confirmation, problem := channel.PublishWithDeferredConfirmWithContext(
			context.Background(), "", "go.confirms", false, false, message)
		must(problem)
		pending = append(pending, confirmation)
	}
	for _, confirmation := range pending {
		check(confirmation.Wait(), "it is acked")
	}
	queue, problem := channel.QueueInspect("go.confirms")
	must(problem)
	check(queue.Messages == 500, "all are there, and not %d", queue.Messages)
}

func prefetch(connection *amqp.Connection) {
	channel := open(connection)
	must(channel.Qos(10, 0, false))
	deliveries := consume(channel, "go.confirms", false)
	for number := 0; number < 500; number++ {
		delivery := next(deliveries)
		check(string(delivery.Body) == strconv.Itoa(number), "all in order")
		check(len(deliveries) < 10, "no more than the prefetch")
		if number%10 == 9 {
			must(delivery.Ack(true))
		}
	}
}

func requeue(connection *amqp.Connection) {
	channel := open(connection)
	queue := declare(channel, "", false, true, nil)
	deliveries := consume(channel, queue, false)
	publish(channel, "", queue, text("1"))
	publish(channel, "", queue, text("2"))
	first, second := next(deliveries), next(deliveries)
	must(first.Nack(false, true))
	must(second.Reject(false))
	again := next(deliveries)
	check(again.Redelivered && string(again.Body) == "1", "the first came back, flagged")
	must(again.Ack(false))
}

func topic(connection *amqp.Connection) {
	channel := open(connection)
	must(channel.ExchangeDeclare("go.topic", amqp.ExchangeTopic, false, true, false, false, nil))
	queue := declare(channel, "", false, true, nil)
	must(channel.QueueBind(queue, "*.critical", "go.topic", false, nil))
	must(channel.QueueBind(queue, "kern.#", "go.topic", false, nil))
	for _, key := range []string{"kern.critical", "auth.info", "auth.critical", "kern"} {
		publish(channel, "go.topic", key, text(key))
	}
	deliveries := consume(channel, queue, true)
	for _, key := range []string{"kern.critical", "auth.critical", "kern"} {
		check(string(next(deliveries).Body) == key, "by pattern")
	}
}

func returned(connection *amqp.Connection) {
	channel := open(connection)
	must(channel.Confirm(false))
	back := channel.NotifyReturn(make(chan amqp.Return, 1))
	message := amqp.Publishing{Body: []byte("lost"), MessageId: "m"}
	confirmation, problem := channel.PublishWithDeferredConfirmWithContext(
		context.Background(), "amq.direct", "go.nobody", true, false, message)
	must(problem)
	check(confirmation.Wait(), "it is confirmed all the same")
	told := <-back
	check(told.ReplyCode == amqp.NoRoute && told.MessageId == "m" && string(told.Body) == "lost", "returned")
}

func deadLetter(connection *amqp.Connection) {
	channel := open(connection)
	declare(channel, "go.dead", false, false, nil)
	declare(channel, "go.mortal", false, false, amqp.Table{
		"x-message-ttl": int32(100), "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "go.dead"})
	publish(channel, "", "go.mortal", text("late"))
	delivery := next(consume(channel, "go.dead", true))
	death := delivery.Headers["x-death"].([]interface{})[0].(amqp.Table)
	check(death["queue"] == "go.mortal" && death["reason"] == "expired" && death["count"] == int64(1), "its death: %v", death)
}

func rpc(connection *amqp.Connection) {
	serving := open(connection)
	declare(serving, "go.rpc", false, false, nil)
	questions := consume(serving, "go.rpc", true)
	go func() {
		for asked := range questions {
			number, _ := strconv.Atoi(string(asked.Body))
			publish(serving, "", asked.ReplyTo, amqp.Publishing{
				Body: []byte(strconv.Itoa(2 * number)), CorrelationId: asked.CorrelationId})
		}
	}()
	asking := open(connection)
	for _, replyTo := range []string{declare(asking, "", false, true, nil), "amq.rabbitmq.reply-to"} {
		answers := consume(asking, replyTo, true)
		for number := 0; number < 5; number++ {
			publish(asking, "", "go.rpc", amqp.Publishing{
				Body: []byte(strconv.Itoa(number)), CorrelationId: strconv.Itoa(number), ReplyTo: replyTo})
		}
		for number := 0; number < 5; number++ {
			answer := next(answers)
			asked, _ := strconv.Atoi(answer.CorrelationId)
			check(string(answer.Body) == strconv.Itoa(2*asked), "the answer")
		}
	}
}

func headers(connection *amqp.Connection) {
	told := amqp.Table{
		"text": "šedá", "bytes": []byte{0, 255}, "yes": true, "int8": int8(-5), "byte": byte(200), "int16": int16(-300), "int32": int32(-70000),
		"int64": int64(1) << 40, "float32": float32(0.5), "float64": 0.25, "nothing": nil,
		"decimal": amqp.Decimal{Scale: 2, Value: 314}, "time": time.Unix(1767323045, 0),
		"list": []interface{}{int32(1), "two", amqp.Table{"three": int32(3)}}, "table": amqp.Table{"a": amqp.Table{"b": "c"}},
	}
	sent := amqp.Publishing{
		Headers: told, ContentType: "text/plain", ContentEncoding: "utf-8", DeliveryMode: amqp.Persistent, Priority: 3,
		CorrelationId: "c", ReplyTo: "r", Expiration: "60000", MessageId: "m", Timestamp: time.Unix(1767323045, 0),
		Type: "t", UserId: "guest", AppId: "a", Body: []byte("body"),
	}
	channel := open(connection)
	queue := declare(channel, "", false, true, nil)
	publish(channel, "", queue, sent)
	came := next(consume(channel, queue, true))
	check(reflect.DeepEqual(came.Headers, told), "headers: %v", came.Headers)
	check(came.ContentType == sent.ContentType && came.ContentEncoding == sent.ContentEncoding, "content")
	check(came.DeliveryMode == sent.DeliveryMode && came.Priority == sent.Priority, "mode and priority")
	check(came.CorrelationId == sent.CorrelationId && came.ReplyTo == sent.ReplyTo, "correlation")
	check(came.Expiration == sent.Expiration && came.MessageId == sent.MessageId, "expiration and id")
	check(came.Timestamp.Equal(sent.Timestamp) && came.Type == sent.Type, "time and type")
	check(came.UserId == sent.UserId && came.AppId == sent.AppId, "user and application")
}

func largeBody(_ *amqp.Connection) {
	body := bytes.Repeat([]byte("0123456789abcdef"), 256*1024)
	for _, frame := range []int{0, 8192} {
		connection := connect(amqp.Config{FrameSize: frame})
		channel := open(connection)
		queue := declare(channel, "", false, true, nil)
		publish(channel, "", queue, amqp.Publishing{Body: body})
		delivery, found, problem := channel.Get(queue, true)
		must(problem)
		check(found && bytes.Equal(delivery.Body, body), "it is whole")
		must(connection.Close())
	}
}

func failure(connection *amqp.Connection) {
	channel := open(connection)
	closed := channel.NotifyClose(make(chan *amqp.Error, 1))
	_, problem := channel.QueueInspect("go.nowhere")
	check(problem != nil, "a queue that is not there is not found")
	check((<-closed).Code == amqp.NotFound, "it is 404")
	declare(open(connection), "", false, true, nil)
}

func cancel(connection *amqp.Connection) {
	channel := open(connection)
	declare(channel, "go.cancel", false, false, nil)
	told := channel.NotifyCancel(make(chan string, 1))
	_, problem := channel.Consume("go.cancel", "mine", false, false, false, false, nil)
	must(problem)
	_, problem = open(connection).QueueDelete("go.cancel", false, false, false)
	must(problem)
	check(<-told == "mine", "the consumer is told")
}

func heartbeat(_ *amqp.Connection) {
	connection := connect(amqp.Config{Heartbeat: time.Second})
	channel := open(connection)
	time.Sleep(3500 * time.Millisecond)
	declare(channel, "", false, true, nil)
	must(connection.Close())
}

func restart(_ *amqp.Connection) {
	connection := connect(amqp.Config{})
	closed := connection.NotifyClose(make(chan *amqp.Error, 1))
	channel := open(connection)
	must(channel.Confirm(false))
	declare(channel, "go.kept", true, false, nil)
	var last *amqp.DeferredConfirmation
	for number := 0; number < 50; number++ {
		message := amqp.Publishing{Body: []byte(strconv.Itoa(number)), DeliveryMode: amqp.Persistent}
		confirmation, problem := channel.PublishWithDeferredConfirmWithContext(
			context.Background(), "", "go.kept", false, false, message)
		must(problem)
		last = confirmation
	}
	check(last.Wait(), "confirmed")
	fmt.Println("restart")
	line, problem := stdin.ReadString('\n')
	must(problem)
	check(strings.TrimSpace(line) == "restarted", "the broker is back")
	<-closed
	again := connect(amqp.Config{})
	deliveries := consume(open(again), "go.kept", true)
	for number := 0; number < 50; number++ {
		check(string(next(deliveries).Body) == strconv.Itoa(number), "all are there, in order")
	}
	must(again.Close())
}

func main() {
	features := []struct {
		name string
		show func(*amqp.Connection)
	}{
		{"confirms", confirms}, {"prefetch", prefetch}, {"requeue", requeue}, {"topic", topic}, {"return", returned},
		{"dead-letter", deadLetter}, {"rpc", rpc}, {"headers", headers}, {"large-body", largeBody}, {"error", failure},
		{"cancel", cancel}, {"heartbeat", heartbeat}, {"restart", restart},
	}
	for _, feature := range features {
		connection := connect(amqp.Config{})
		feature.show(connection)
		// A restart has ended it already.
		if feature.name != "restart" {
			must(connection.Close())
		}
		fmt.Println("shown", feature.name)
	}
}
