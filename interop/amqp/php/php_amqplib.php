<?php
// php-amqplib, as PHP applications and their workers use it; it logs in by AMQPLAIN. Speaks the lines of interop/client.py.
declare(strict_types=1);

require_once 'PhpAmqpLib/autoload.php';

use PhpAmqpLib\Channel\AMQPChannel;
use PhpAmqpLib\Connection\AMQPStreamConnection;
use PhpAmqpLib\Exception\AMQPBasicCancelException;
use PhpAmqpLib\Exception\AMQPConnectionClosedException;
use PhpAmqpLib\Exception\AMQPHeartbeatMissedException;
use PhpAmqpLib\Exception\AMQPIOException;
use PhpAmqpLib\Exception\AMQPProtocolChannelException;
use PhpAmqpLib\Message\AMQPMessage;
use PhpAmqpLib\Wire\AMQPDecimal;
use PhpAmqpLib\Wire\AMQPTable;

const WAIT_SECONDS = 20;

set_error_handler(function (int $kind, string $text, string $file, int $line): bool {
    // The library of this age is not written for this PHP; it says so at every turn.
    if (in_array($kind, [E_DEPRECATED, E_USER_DEPRECATED], true)) {
        return true;
    }
    throw new ErrorException($text, 0, $kind, $file, $line);
});

function check(bool $holds, string $what): void
{
    if (!$holds) {
        throw new RuntimeException("not so: $what");
    }
}

function connect(int $heartbeat = 0): AMQPStreamConnection
{
    $url = parse_url(getenv('AMQP_URL'));
    return new AMQPStreamConnection(
        $url['host'], $url['port'], $url['user'], $url['pass'], '/', false, 'AMQPLAIN', null, 'en_US',
        WAIT_SECONDS, WAIT_SECONDS, null, false, $heartbeat
    );
}

/** The next deliveries, not acknowledged. */
function take(AMQPChannel $channel, string $queue, int $count, bool $noAck = false): array
{
    $taken = [];
    $tag = $channel->basic_consume($queue, '', false, $noAck, false, false, function (AMQPMessage $message) use (&$taken) {
        $taken[] = $message;
    });
    while (count($taken) < $count) {
        $channel->wait(null, false, WAIT_SECONDS);
    }
    $channel->basic_cancel($tag);
    return $taken;
}

function bodies(array $messages): array
{
    return array_map(fn (AMQPMessage $message) => $message->getBody(), $messages);
}

function own_queue(AMQPChannel $channel): string
{
    return $channel->queue_declare('', false, false, true, true)[0];
}

function confirms(AMQPStreamConnection $connection): void
{
    $channel = $connection->channel();
    $channel->queue_declare('php.confirms', false, true, false, false);
    $acked = 0;
    $channel->set_ack_handler(function () use (&$acked) { $acked++; });
    $channel->set_nack_handler(function () { throw new RuntimeException('nacked'); });
    $channel->confirm_select();
    for ($number = 0; $number < 200; $number++) {
        $channel->basic_publish(new AMQPMessage((string) $number, ['delivery_mode' => 2]), '', 'php.confirms');
    }
    $channel->wait_for_pending_acks(WAIT_SECONDS);
    check($acked === 200, "200 confirms, and not $acked");
}

function prefetch(AMQPStreamConnection $connection): void
{
    $channel = $connection->channel();
    $channel->basic_qos(0, 10, false);
    $done = [];
    $held = 0;
    $channel->basic_consume('php.confirms', '', false, false, false, false, function (AMQPMessage $message) use (&$done, &$held) {
        $held++;
        check($held <= 10, 'no more than the prefetch');
        $done[] = (int) $message->getBody();
        if ($held === 10) {
            $message->ack(true);
            $held = 0;
        }
    });
    while (count($done) < 200) {
        $channel->wait(null, false, WAIT_SECONDS);
    }
    check($done === range(0, 199), 'all in order');
}

function requeue(AMQPStreamConnection $connection): void
{
    $channel = $connection->channel();
    // Exclusive, and not auto-delete: it is consumed from twice.
    [$queue] = $channel->queue_declare('', false, false, true, false);
    foreach (['1', '2'] as $body) {
        $channel->basic_publish(new AMQPMessage($body), '', $queue);
    }
    [$first, $second] = take($channel, $queue, 2);
    $first->nack(true);
    $second->reject(false);
    [$again] = take($channel, $queue, 1);
    check($again->getBody() === '1' && $again->isRedelivered(), 'the first came back, flagged');
    $again->ack();
    check($channel->basic_get($queue) === null, 'nothing is left');
}

function topic(AMQPStreamConnection $connection): void
{
    $channel = $connection->channel();
    $channel->exchange_declare('php.topic', 'topic', false, false, true);
    $queue = own_queue($channel);
    $channel->queue_bind($queue, 'php.topic', '*.critical');
    $channel->queue_bind($queue, 'php.topic', 'kern.#');
    foreach (['kern.critical', 'auth.info', 'auth.critical', 'kern'] as $key) {
        $channel->basic_publish(new AMQPMessage($key), 'php.topic', $key);
    }
    check(bodies(take($channel, $queue, 3, true)) === ['kern.critical', 'auth.critical', 'kern'], 'by pattern');
}

function returned(AMQPStreamConnection $connection): void
{
    $channel = $connection->channel();
    $back = [];
    $channel->set_return_listener(function ($code, $text, $exchange, $key, AMQPMessage $message) use (&$back) {
        $back[] = [$code, $key, $message->getBody(), $message->get('message_id')];
    });
    $channel->confirm_select();
    $channel->basic_publish(new AMQPMessage('lost', ['message_id' => 'm']), 'amq.direct', 'php.nobody', true);
    $channel->wait_for_pending_acks_returns(WAIT_SECONDS);
    check($back === [[312, 'php.nobody', 'lost', 'm']], 'returned');
}

function dead_letter(AMQPStreamConnection $connection): void
{
    $channel = $connection->channel();
    $channel->queue_declare('php.dead', false, false, false, false);
    $channel->queue_declare('php.mortal', false, false, false, false, false, new AMQPTable([
        'x-message-ttl' => 100,
        'x-dead-letter-exchange' => '',
        'x-dead-letter-routing-key' => 'php.dead',
    ]));
    $channel->basic_publish(new AMQPMessage('late'), '', 'php.mortal');
    [$message] = take($channel, 'php.dead', 1, true);
    $death = $message->get('application_headers')->getNativeData()['x-death'][0];
    check([$death['queue'], $death['reason'], $death['count']] === ['php.mortal', 'expired', 1], 'its death is told');
}

function rpc(AMQPStreamConnection $connection): void
{
    $serving = $connection->channel();
    $serving->queue_declare('php.rpc', false, false, false, false);
    $serving->basic_consume('php.rpc', '', false, false, false, false, function (AMQPMessage $asked) {
        $answer = new AMQPMessage((string) (2 * (int) $asked->getBody()), ['correlation_id' => $asked->get('correlation_id')]);
        $asked->getChannel()->basic_publish($answer, '', $asked->get('reply_to'));
        $asked->ack();
    });
    $asking = $connection->channel();
    foreach ([own_queue($asking), 'amq.rabbitmq.reply-to'] as $reply_to) {
        $answers = [];
        $asking->basic_consume($reply_to, '', false, true, false, false, function (AMQPMessage $answer) use (&$answers) {
            $answers[$answer->get('correlation_id')] = $answer->getBody();
        });
        for ($number = 0; $number < 5; $number++) {
            $properties = ['correlation_id' => "n$number", 'reply_to' => $reply_to];
            $asking->basic_publish(new AMQPMessage((string) $number, $properties), '', 'php.rpc');
        }
        while (count($answers) < 5) {
            foreach ([$serving, $asking] as $channel) {
                try {
                    $channel->wait(null, true);
                } catch (\PhpAmqpLib\Exception\AMQPTimeoutException) {
                }
            }
            usleep(1000);
        }
        check($answers === ['n0' => '0', 'n1' => '2', 'n2' => '4', 'n3' => '6', 'n4' => '8'], 'answers');
    }
}

function headers(AMQPStreamConnection $connection): void
{
    $told = [
        'text' => 'šedá', 'yes' => true, 'int' => -5, 'long' => 2 ** 40, 'nothing' => null,
        'list' => [1, 'two', ['three' => 3]], 'table' => ['a' => ['b' => 'c']],
        'decimal' => new AMQPDecimal(314, 2), 'time' => new DateTime('2026-01-02 03:04:05', new DateTimeZone('UTC')),
    ];
    $properties = [
        'content_type' => 'text/plain', 'content_encoding' => 'utf-8', 'delivery_mode' => 2, 'priority' => 3,
        'correlation_id' => 'c', 'reply_to' => 'r', 'expiration' => '60000', 'message_id' => 'm', 'timestamp' => 1767323045,
        'type' => 't', 'user_id' => 'guest', 'app_id' => 'a',
    ];
    $channel = $connection->channel();
    $queue = own_queue($channel);
    $sent = new AMQPMessage('body', $properties);
    $sent->set('application_headers', new AMQPTable($told));
    $channel->basic_publish($sent, '', $queue);
    [$message] = take($channel, $queue, 1, true);
    foreach ($properties as $name => $value) {
        check($message->get($name) == $value, $name);
    }
    $came = $message->get('application_headers')->getNativeData();
    foreach (['text', 'yes', 'int', 'long', 'nothing', 'list', 'table'] as $name) {
        check($came[$name] === $told[$name], $name);
    }
    check([$came['decimal']->getN(), $came['decimal']->getE()] == [314, 2], 'decimal');
    check($came['time']->getTimestamp() === $told['time']->getTimestamp(), 'time');
}

function large_body(AMQPStreamConnection $connection): void
{
    $body = str_repeat('0123456789abcdef', 256 * 1024);
    $channel = $connection->channel();
    $channel->confirm_select();
    $queue = own_queue($channel);
    $channel->basic_publish(new AMQPMessage($body), '', $queue);
    $channel->wait_for_pending_acks(WAIT_SECONDS);
    check($channel->basic_get($queue, true)->getBody() === $body, 'it is whole');
}

function error(AMQPStreamConnection $connection): void
{
    $channel = $connection->channel();
    try {
        $channel->queue_declare('php.nowhere', true);
        check(false, 'a queue that is not there was found');
    } catch (AMQPProtocolChannelException $problem) {
        check($problem->amqp_reply_code === 404, 'it is 404');
    }
    own_queue($connection->channel());
}

function cancel(AMQPStreamConnection $connection): void
{
    $channel = $connection->channel();
    $channel->queue_declare('php.cancel', false, false, false, false);
    $channel->basic_consume('php.cancel');
    $connection->channel()->queue_delete('php.cancel');
    try {
        $channel->wait(null, false, WAIT_SECONDS);
        check(false, 'the consumer was not told');
    } catch (AMQPBasicCancelException) {
    }
}

function heartbeat(): void
{
    $connection = connect(2);
    $channel = $connection->channel();
    for ($beat = 0; $beat < 10; $beat++) {
        usleep(500000);
        $connection->checkHeartBeat();
    }
    own_queue($channel);
    $connection->close();
}

function restart(AMQPStreamConnection $connection): void
{
    $channel = $connection->channel();
    $channel->queue_declare('php.kept', false, true, false, false);
    $channel->confirm_select();
    for ($number = 0; $number < 50; $number++) {
        $channel->basic_publish(new AMQPMessage((string) $number, ['delivery_mode' => 2]), '', 'php.kept');
    }
    $channel->wait_for_pending_acks(WAIT_SECONDS);
    $channel->basic_consume('php.kept');
    echo "restart\n";
    check(trim(fgets(STDIN)) === 'restarted', 'the broker is back');
    try {
        while (true) {
            $channel->wait(null, false, WAIT_SECONDS);
        }
    } catch (AMQPConnectionClosedException | AMQPIOException | AMQPHeartbeatMissedException) {
    }
    $connection->reconnect();
    $found = take($connection->channel(), 'php.kept', 50, true);
    check(bodies($found) === array_map('strval', range(0, 49)), 'all are there');
}

$features = [
    'confirms' => confirms(...), 'prefetch' => prefetch(...), 'requeue' => requeue(...), 'topic' => topic(...),
    'return' => returned(...), 'dead-letter' => dead_letter(...), 'rpc' => rpc(...), 'headers' => headers(...),
    'large-body' => large_body(...), 'error' => error(...), 'cancel' => cancel(...), 'heartbeat' => heartbeat(...),
    'restart' => restart(...),
];
foreach ($features as $name => $show) {
    $connection = connect();
    $show($connection);
    $connection->close();
    echo "shown $name\n";
}
