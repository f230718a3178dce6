// RabbitMQ's own Java client, with the automatic recovery that it has on by default. Speaks the lines of interop/client.py.
//
// Run from its source: java -cp amqp-client.jar:slf4j-api.jar AmqpClient.java

import com.rabbitmq.client.AMQP;
import com.rabbitmq.client.Channel;
import com.rabbitmq.client.Connection;
import com.rabbitmq.client.ConnectionFactory;
import com.rabbitmq.client.DefaultConsumer;
import com.rabbitmq.client.Envelope;
import com.rabbitmq.client.GetResponse;
import com.rabbitmq.client.MessageProperties;
import com.rabbitmq.client.Recoverable;
import com.rabbitmq.client.RecoveryListener;
import com.rabbitmq.client.RpcClient;
import com.rabbitmq.client.RpcServer;
import com.rabbitmq.client.ShutdownSignalException;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.math.BigDecimal;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Date;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;

public class AmqpClient {
    static final int WAIT_SECONDS = 20;
    static final BufferedReader STDIN = new BufferedReader(new InputStreamReader(System.in));

    interface Feature {
        void show(Connection connection) throws Exception;
    }

    record Delivery(Envelope envelope, AMQP.BasicProperties properties, byte[] body) {
        String text() {
            return new String(body);
        }
    }

    static void check(boolean holds, String what) {
        if (!holds) throw new IllegalStateException("not so: " + what);
    }

    static ConnectionFactory factory() throws Exception {
        ConnectionFactory factory = new ConnectionFactory();
        factory.setUri(System.getenv("AMQP_URL"));
        factory.setNetworkRecoveryInterval(200);
        return factory;
    }

    static <T> T next(BlockingQueue<T> queue) throws InterruptedException {
        T found = queue.poll(WAIT_SECONDS, TimeUnit.SECONDS);
        check(found != null, "it came");
        return found;
    }

    static BlockingQueue<Delivery> consume(Channel channel, String queue, boolean autoAck) throws IOException {
        BlockingQueue<Delivery> deliveries = new LinkedBlockingQueue<>();
        channel.basicConsume(queue, autoAck, new DefaultConsumer(channel) {
            @Override
            public void handleDelivery(String tag, Envelope envelope, AMQP.BasicProperties properties, byte[] body) {
                deliveries.add(new Delivery(envelope, properties, body));
            }
        });
        return deliveries;
    }

    static void confirms(Connection connection) throws Exception {
        Channel channel = connection.createChannel();
        channel.confirmSelect();
        channel.queueDeclare("java.confirms", true, false, false, null);
        for (int number = 0; number < 500; number++) {
            channel.basicPublish("", "java.confirms", MessageProperties.PERSISTENT_BASIC, Integer.toString(number).getBytes());
        }
        check(channel.waitForConfirms(WAIT_SECONDS * 1000L), "all are acked");
        check(channel.messageCount("java.confirms") == 500, "all are there");
    }

    static void prefetch(Connection connection) throws Exception {
        Channel channel = connection.createChannel();
        channel.basicQos(10);
        BlockingQueue<Delivery> deliveries = consume(channel, "java.confirms", false);
        for (int number = 0; number < 500; number++) {
            Delivery delivery = next(deliveries);
            check(deliveries.size() < 10, "no more than the prefetch");
            check(delivery.text().equals(Integer.toString(number)), "all in order");
            if (number % 10 == 9) channel.basicAck(delivery.envelope().getDeliveryTag(), true);
        }
    }

    static void requeue(Connection connection) throws Exception {
        Channel channel = connection.createChannel();
        String queue = channel.queueDeclare().getQueue();
        BlockingQueue<Delivery> deliveries = consume(channel, queue, false);
        for (String body : List.of("1", "2")) channel.basicPublish("", queue, null, body.getBytes());
        Delivery first = next(deliveries);
        Delivery second = next(deliveries);
        channel.basicNack(first.envelope().getDeliveryTag(), false, true);
        channel.basicReject(second.envelope().getDeliveryTag(), false);
        Delivery again = next(deliveries);
        check(again.text().equals("1") && again.envelope().isRedeliver(), "the first came back, flagged");
        channel.basicAck(again.envelope().getDeliveryTag(), false);
    }

    static void topic(Connection connection) throws Exception {
        Channel channel = connection.createChannel();
        channel.exchangeDeclare("java.topic", "topic", false, true, null);
        String queue = channel.queueDeclare().getQueue();
        channel.queueBind(queue, "java.topic", "*.critical");
        channel.queueBind(queue, "java.topic", "kern.#");
        for (String key : List.of("kern.critical", "auth.info", "auth.critical", "kern")) {
            channel.basicPublish("java.topic", key, null, key.getBytes());
        }
        BlockingQueue<Delivery> deliveries = consume(channel, queue, true);
        for (String key : List.of("kern.critical", "auth.critical", "kern")) {
            check(next(deliveries).text().equals(key), "by pattern");
        }
    }

    static void returned(Connection connection) throws Exception {
        Channel channel = connection.createChannel();
        channel.confirmSelect();
        BlockingQueue<String> back = new LinkedBlockingQueue<>();
        channel.addReturnListener((code, text, exchange, key, properties, body) ->
            back.add(code + " " + properties.getMessageId() + " " + new String(body)));
        AMQP.BasicProperties properties = new AMQP.BasicProperties.Builder().messageId("m").build();
        channel.basicPublish("amq.direct", "java.nobody", true, properties, "lost".getBytes());
        check(channel.waitForConfirms(WAIT_SECONDS * 1000L), "it is confirmed all the same");
        check(next(back).equals("312 m lost"), "returned");
    }

    @SuppressWarnings("unchecked")
    static void deadLetter(Connection connection) throws Exception {
        Channel channel = connection.createChannel();
        channel.queueDeclare("java.dead", false, false, false, null);
        channel.queueDeclare("java.mortal", false, false, false, Map.of(
            "x-message-ttl", 100, "x-dead-letter-exchange", "", "x-dead-letter-routing-key", "java.dead"));
        channel.basicPublish("", "java.mortal", null, "late".getBytes());
        Delivery delivery = next(consume(channel, "java.dead", true));
        List<Map<String, Object>> deaths = (List<Map<String, Object>>) delivery.properties().getHeaders().get("x-death");
        Map<String, Object> death = deaths.get(0);
        check(death.get("queue").toString().equals("java.mortal"), "its queue");
        check(death.get("reason").toString().equals("expired"), "the reason");
        check(death.get("count").equals(1L), "the count");
    }

    static void rpc(Connection connection) throws Exception {
        Channel serving = connection.createChannel();
        serving.queueDeclare("java.rpc", false, false, false, null);
        RpcServer server = new RpcServer(serving, "java.rpc") {
            @Override
            public byte[] handleCall(byte[] asked, AMQP.BasicProperties answer) {
                return Integer.toString(2 * Integer.parseInt(new String(asked))).getBytes();
            }
        };
        Thread thread = new Thread(() -> {
            try {
                server.mainloop();
            } catch (Exception ended) {
                check(ended instanceof ShutdownSignalException, "it serves until the end");
            }
        });
        thread.setDaemon(true);
        thread.start();
        Channel asking = connection.createChannel();
        String own = asking.queueDeclare().getQueue();
        for (String replyTo : List.of(own, "amq.rabbitmq.reply-to")) {
            RpcClient client = new RpcClient(asking, "", "java.rpc", replyTo, WAIT_SECONDS * 1000);
            for (int number = 0; number < 5; number++) {
                check(client.stringCall(Integer.toString(number)).equals(Integer.toString(2 * number)), "the answer");
            }
            client.close();
        }
        server.terminateMainloop();
    }

    static void headers(Connection connection) throws Exception {
        Map<String, Object> told = new HashMap<>();
        told.put("yes", true);
        told.put("byte", (byte) -5);
        told.put("short", (short) -300);
        told.put("int", -70000);
        told.put("long", 1L << 40);
        told.put("float", 0.5f);
        told.put("double", 0.25);
        told.put("nothing", null);
        told.put("bytes", new byte[] {0, -1});
        told.put("decimal", new BigDecimal("3.14"));
        told.put("time", new Date(1767323045000L));
        told.put("list", List.of(1, 2, Map.of("three", 3)));
        told.put("table", Map.of("a", Map.of("b", 1)));
        Map<String, Object> all = new HashMap<>(told);
        all.put("text", "šedá");
        AMQP.BasicProperties sent = new AMQP.BasicProperties.Builder()
            .headers(all).contentType("text/plain").contentEncoding("utf-8").deliveryMode(2).priority(3).correlationId("c")
            .replyTo("r").expiration("60000").messageId("m").timestamp(new Date(1767323045000L)).type("t").userId("guest")
            .appId("a").build();
        Channel channel = connection.createChannel();
        String queue = channel.queueDeclare().getQueue();
        channel.basicPublish("", queue, sent, "body".getBytes());
        AMQP.BasicProperties came = next(consume(channel, queue, true)).properties();
        for (Map.Entry<String, Object> entry : told.entrySet()) {
            Object value = came.getHeaders().get(entry.getKey());
            boolean same = entry.getValue() instanceof byte[] bytes
                ? Arrays.equals(bytes, (byte[]) value)
                : java.util.Objects.equals(entry.getValue(), value);
            check(same, entry.getKey() + ": " + value);
        }
        check(came.getHeaders().get("text").toString().equals("šedá"), "text");
        check(came.getHeaders().size() == all.size(), "no more");
        String rest = came.builder().headers(null).build().toString();
        check(rest.equals(sent.builder().headers(null).build().toString()), "properties: " + rest);
    }

    static void largeBody(Connection connection) throws Exception {
        byte[] body = "0123456789abcdef".repeat(256 * 1024).getBytes();
        for (int frame : new int[] {0, 8192}) {
            ConnectionFactory factory = factory();
            factory.setRequestedFrameMax(frame);
            try (Connection other = factory.newConnection()) {
                Channel channel = other.createChannel();
                String queue = channel.queueDeclare().getQueue();
                channel.basicPublish("", queue, null, body);
                GetResponse got = channel.basicGet(queue, true);
                check(Arrays.equals(got.getBody(), body), "it is whole");
            }
        }
    }

    static void error(Connection connection) throws Exception {
        Channel channel = connection.createChannel();
        try {
            channel.queueDeclarePassive("java.nowhere");
            check(false, "a queue that is not there was found");
        } catch (IOException problem) {
            ShutdownSignalException signal = (ShutdownSignalException) problem.getCause();
            check(((AMQP.Channel.Close) signal.getReason()).getReplyCode() == 404, "it is 404");
        }
        connection.createChannel().queueDeclare();
    }

    static void cancel(Connection connection) throws Exception {
        Channel channel = connection.createChannel();
        channel.queueDeclare("java.cancel", false, false, false, null);
        BlockingQueue<String> cancelled = new LinkedBlockingQueue<>();
        channel.basicConsume("java.cancel", false, "mine", new DefaultConsumer(channel) {
            @Override
            public void handleCancel(String tag) {
                cancelled.add(tag);
            }
        });
        connection.createChannel().queueDelete("java.cancel");
        check(next(cancelled).equals("mine"), "the consumer is told");
    }

    static void heartbeat(Connection connection) throws Exception {
        ConnectionFactory factory = factory();
        factory.setRequestedHeartbeat(1);
        factory.setAutomaticRecoveryEnabled(false);
        try (Connection beating = factory.newConnection()) {
            Channel channel = beating.createChannel();
            Thread.sleep(3500);
            channel.queueDeclare();
        }
    }

    /** The connection comes back by itself, with its exchange, its queues, their bindings and consumers. */
    static void restart(Connection ended) throws Exception {
        Connection connection = factory().newConnection();
        BlockingQueue<Boolean> recovered = new LinkedBlockingQueue<>();
        ((Recoverable) connection).addRecoveryListener(new RecoveryListener() {
            @Override
            public void handleRecovery(Recoverable whole) {
                recovered.add(true);
            }

            @Override
            public void handleRecoveryStarted(Recoverable whole) {}
        });
        Channel channel = connection.createChannel();
        channel.confirmSelect();
        channel.queueDeclare("java.kept", true, false, false, null);
        for (int number = 0; number < 50; number++) {
            channel.basicPublish("", "java.kept", MessageProperties.PERSISTENT_BASIC, Integer.toString(number).getBytes());
        }
        check(channel.waitForConfirms(WAIT_SECONDS * 1000L), "confirmed");
        channel.exchangeDeclare("java.news", "fanout");
        String own = channel.queueDeclare().getQueue();
        channel.queueBind(own, "java.news", "");
        BlockingQueue<Delivery> news = consume(channel, own, true);
        System.out.println("restart");
        check("restarted".equals(STDIN.readLine()), "the broker is back");
        next(recovered);
        channel.basicPublish("java.news", "", null, "after".getBytes());
        check(next(news).text().equals("after"), "the consumer goes on");
        BlockingQueue<Delivery> kept = consume(channel, "java.kept", true);
        List<String> found = new ArrayList<>();
        for (int number = 0; number < 50; number++) found.add(next(kept).text());
        for (int number = 0; number < 50; number++) check(found.get(number).equals(Integer.toString(number)), "all are there");
        connection.close();
    }

    public static void main(String[] arguments) throws Exception {
        Map<String, Feature> features = new java.util.LinkedHashMap<>();
        features.put("confirms", AmqpClient::confirms);
        features.put("prefetch", AmqpClient::prefetch);
        features.put("requeue", AmqpClient::requeue);
        features.put("topic", AmqpClient::topic);
        features.put("return", AmqpClient::returned);
        features.put("dead-letter", AmqpClient::deadLetter);
        features.put("rpc", AmqpClient::rpc);
        features.put("headers", AmqpClient::headers);
        features.put("large-body", AmqpClient::largeBody);
        features.put("error", AmqpClient::error);
        features.put("cancel", AmqpClient::cancel);
        features.put("heartbeat", AmqpClient::heartbeat);
        features.put("restart", AmqpClient::restart);
        for (Map.Entry<String, Feature> feature : features.entrySet()) {
            try (Connection connection = factory().newConnection()) {
                feature.getValue().show(connection);
            }
            System.out.println("shown " + feature.getKey());
        }
        System.exit(0);
    }
}
