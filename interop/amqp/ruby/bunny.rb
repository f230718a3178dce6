# bunny, with the automatic recovery that Ruby applications rely on. Speaks the lines of interop/client.py.
require "bunny"
require "time"

WAIT_SECONDS = 20
$stdout.sync = true

def check(holds, what)
  raise "not so: #{what}" unless holds
end

def connect(**options)
  connection = Bunny.new(ENV.fetch("AMQP_URL"), continuation_timeout: WAIT_SECONDS * 1000, log_level: Logger::ERROR, **options)
  connection.start
  connection
end

# The next deliveries, not acknowledged unless told so.
def take(queue, count, **options)
  taken = Queue.new
  consumer = queue.subscribe(manual_ack: true, **options) { |info, properties, body| taken << [info, properties, body] }
  messages = count.times.map { next_of(taken) }
  consumer.cancel
  messages
end

def next_of(queue)
  Timeout.timeout(WAIT_SECONDS) { queue.pop }
end

def confirms(connection)
  channel = connection.create_channel
  channel.confirm_select
  queue = channel.queue("ruby.confirms", durable: true)
  200.times { |number| queue.publish(number.to_s, persistent: true) }
  check channel.wait_for_confirms, "all are acked"
  check channel.unconfirmed_set.empty?, "none is left"
  check queue.message_count == 200, "all are there"
end

def prefetch(connection)
  channel = connection.create_channel
  channel.prefetch(10)
  queue = channel.queue("ruby.confirms", durable: true)
  done = Queue.new
  held = 0
  queue.subscribe(manual_ack: true) do |info, _, body|
    held += 1
    done << (held > 10 ? :too_many : Integer(body))
    if held == 10
      channel.ack(info.delivery_tag, true)
      held = 0
    end
  end
  check 200.times.map { next_of(done) } == (0...200).to_a, "all in order, ten at a time"
end

def requeue(connection)
  channel = connection.create_channel
  queue = channel.queue("", exclusive: true)
  %w[1 2].each { |body| queue.publish(body) }
  first, second = take(queue, 2)
  channel.nack(first[0].delivery_tag, false, true)
  channel.reject(second[0].delivery_tag, false)
  ((info, _, body)) = take(queue, 1)
  check [info.redelivered?, body] == [true, "1"], "the first came back, flagged"
  channel.ack(info.delivery_tag)
  check queue.pop == [nil, nil, nil], "nothing is left"
end

def topic(connection)
  channel = connection.create_channel
  exchange = channel.topic("ruby.topic", auto_delete: true)
  queue = channel.queue("", exclusive: true)
  ["*.critical", "kern.#"].each { |pattern| queue.bind(exchange, routing_key: pattern) }
  %w[kern.critical auth.info auth.critical kern].each { |key| exchange.publish(key, routing_key: key) }
  check take(queue, 3).map(&:last) == %w[kern.critical auth.critical kern], "by pattern"
end

def returned(connection)
  channel = connection.create_channel
  exchange = channel.default_exchange
  back = Queue.new
  exchange.on_return { |info, properties, body| back << [info.reply_code, properties.message_id, body] }
  exchange.publish("lost", routing_key: "ruby.nobody", mandatory: true, message_id: "m")
  check next_of(back) == [312, "m", "lost"], "returned"
end

def dead_letter(connection)
  channel = connection.create_channel
  dead = channel.queue("ruby.dead")
  arguments = { "x-message-ttl" => 100, "x-dead-letter-exchange" => "", "x-dead-letter-routing-key" => "ruby.dead" }
  channel.queue("ruby.mortal", arguments: arguments).publish("late")
  ((info, properties, body)) = take(dead, 1)
  channel.ack(info.delivery_tag)
  death = properties.headers["x-death"].first
  check [body, death["queue"], death["reason"], death["count"]] == ["late", "ruby.mortal", "expired", 1], "its death is told"
end

def rpc(connection)
  serving = connection.create_channel
  serving.queue("ruby.rpc").subscribe do |_, asked, body|
    answer = (2 * Integer(body)).to_s
    serving.default_exchange.publish(answer, routing_key: asked.reply_to, correlation_id: asked.correlation_id)
  end
  asking = connection.create_channel
  [asking.queue("", exclusive: true), asking.queue("amq.rabbitmq.reply-to", no_declare: true)].each do |own|
    answers = Queue.new
    own.subscribe { |_, told, body| answers << [told.correlation_id, body] }
    5.times do |number|
      asking.default_exchange.publish(number.to_s, routing_key: "ruby.rpc", reply_to: own.name, correlation_id: number.to_s)
    end
    check 5.times.map { next_of(answers) }.sort == 5.times.map { |number| [number.to_s, (2 * number).to_s] }, "answers"
  end
end

def headers(connection)
  told = {
    "text" => "šedá", "yes" => true, "int" => -5, "long" => 2**40, "float" => 0.5, "nothing" => nil,
    "list" => [1, "two", { "three" => 3 }], "table" => { "a" => { "b" => "c" } }, "time" => Time.at(1767323045)
  }
  properties = {
    content_type: "text/plain", content_encoding: "utf-8", priority: 3, correlation_id: "c", reply_to: "r",
    expiration: "60000", message_id: "m", timestamp: 1767323045, type: "t", user_id: "guest", app_id: "a"
  }
  channel = connection.create_channel
  queue = channel.queue("", exclusive: true)
  queue.publish("body", persistent: true, headers: told, **properties)
  ((_, came, _)) = take(queue, 1)
  check came.headers.transform_values { |value| value.is_a?(String) ? value.dup.force_encoding("UTF-8") : value } == told, "headers: #{came.headers}"
  check came.timestamp == Time.at(1767323045), "timestamp"
  properties.except(:timestamp).each { |name, value| check came[name] == value, name }
  check came.delivery_mode == 2, "persistent"
end

def large_body(connection)
  body = "0123456789abcdef" * 256 * 1024
  channel = connection.create_channel
  channel.confirm_select
  queue = channel.queue("", exclusive: true)
  queue.publish(body)
  check channel.wait_for_confirms, "confirmed"
  check queue.pop.last == body, "it is whole"
end

def error(connection)
  begin
    connection.create_channel.queue("ruby.nowhere", passive: true)
    check false, "a queue that is not there was found"
  rescue Bunny::NotFound => problem
    check problem.channel_close.reply_code == 404, "it is 404"
  end
  connection.create_channel.queue("", exclusive: true)
end

def cancel(connection)
  channel = connection.create_channel
  queue = channel.queue("ruby.cancel")
  cancelled = Queue.new
  consumer = Bunny::Consumer.new(channel, queue)
  consumer.on_cancellation { |told| cancelled << told.consumer_tag }
  queue.subscribe_with(consumer)
  connection.create_channel.queue_delete("ruby.cancel")
  check next_of(cancelled) == consumer.consumer_tag, "the consumer is told"
end

def heartbeat(_connection)
  beating = connect(heartbeat: 1)
  channel = beating.create_channel
  sleep 3.5
  channel.queue("", exclusive: true)
  beating.close
end

# The session comes back by itself with its exchange, its queues, their bindings and consumers.
def restart(_connection)
  recovered = Queue.new
  connection = connect(network_recovery_interval: 0.2, recover_from_connection_close: true, recovery_completed: -> { recovered << true })
  channel = connection.create_channel
  channel.confirm_select
  kept = channel.queue("ruby.kept", durable: true)
  50.times { |number| kept.publish(number.to_s, persistent: true) }
  check channel.wait_for_confirms, "confirmed"
  news = channel.fanout("ruby.news")
  own = channel.queue("", exclusive: true).bind(news)
  came = Queue.new
  own.subscribe { |_, _, body| came << body }
  puts "restart"
  check $stdin.gets&.strip == "restarted", "the broker is back"
  next_of(recovered)
  news.publish("after")
  check next_of(came) == "after", "the consumer goes on"
  check take(kept, 50).map(&:last) == (0...50).map(&:to_s), "all are there"
  connection.close
end

FEATURES = {
  "confirms" => :confirms, "prefetch" => :prefetch, "requeue" => :requeue, "topic" => :topic, "return" => :returned,
  "dead-letter" => :dead_letter, "rpc" => :rpc, "headers" => :headers, "large-body" => :large_body, "error" => :error,
  "cancel" => :cancel, "heartbeat" => :heartbeat, "restart" => :restart
}.freeze

FEATURES.each do |name, show|
  # A restart ends every connection, so that one makes its own.
  connection = show == :restart ? nil : connect
  send(show, connection)
  connection&.close
  puts "shown #{name}"
end
