package main

import (
	"context"
	"sync"
	"time"

	"github.com/IBM/sarama"
)

type place struct {
	partition int32
	offset    int64
}

// Tally counts what all members of the group received and what happened to them.
type Tally struct {
	lock        sync.Mutex
	received    int
	seen        map[place]struct{}
	sessions    int
	generations map[int32]struct{}
	ends        map[string]int
	errors      map[string]int
}

func newTally() *Tally {
	return &Tally{
		seen:        map[place]struct{}{},
		generations: map[int32]struct{}{},
		ends:        map[string]int{},
		errors:      map[string]int{},
	}
}

func (t *Tally) failed(err error) {
	t.lock.Lock()
	defer t.lock.Unlock()
	t.errors[err.Error()]++
}

// skipped counts the offsets before the last one seen of each partition that nobody received.
func (t *Tally) skipped() int {
	ends := map[int32]int64{}
	for one := range t.seen {
		ends[one.partition] = max(ends[one.partition], one.offset+1)
	}
	expected := 0
	for _, end := range ends {
		expected += int(end)
	}
	return expected - len(t.seen)
}

// member handles the sessions of one member.
type member struct {
	tally  *Tally
	dialer *memberDialer
}

// Setup notes that a session begins.
func (m *member) Setup(session sarama.ConsumerGroupSession) error {
	m.dialer.newGeneration()
	m.tally.lock.Lock()
	defer m.tally.lock.Unlock()
	m.tally.sessions++
	m.tally.generations[session.GenerationID()] = struct{}{}
	return nil
}

// Cleanup notes why the session ended.
func (m *member) Cleanup(session sarama.ConsumerGroupSession) error {
	if cause := context.Cause(session.Context()); cause != nil {
		m.tally.lock.Lock()
		defer m.tally.lock.Unlock()
		m.tally.ends[cause.Error()]++
	}
	return nil
}

// ConsumeClaim counts and marks each record; the client commits the marks every second.
func (m *member) ConsumeClaim(
	session sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim,
) error {
	for {
		select {
		case <-session.Context().Done():
			return nil
		case message, open := <-claim.Messages():
			if !open {
				return nil
			}
			m.tally.lock.Lock()
			m.tally.received++
			m.tally.seen[place{message.Partition, message.Offset}] = struct{}{}
			m.tally.lock.Unlock()
			session.MarkMessage(message, "")
		}
	}
}

// Group is what all members share.
type Group struct {
	brokers    []string
	topic      string
	id         string
	clientID   string
	fetchBytes int32
	tally      *Tally
	wire       *Wire
}

// consume runs one member until the context is done. It begins again after whatever fails, as a
// service would.
func (g *Group) consume(ctx context.Context) {
	dialer := &memberDialer{wire: g.wire}
	config := g.config(dialer)
	for ctx.Err() == nil {
		group, err := sarama.NewConsumerGroup(g.brokers, g.id, config)
		if err != nil {
			g.tally.failed(err)
			time.Sleep(config.Consumer.Retry.Backoff)
			continue
		}
		go func() {
			for err := range group.Errors() {
				g.tally.failed(err)
			}
		}()
		for ctx.Err() == nil {
			if err := group.Consume(ctx, []string{g.topic}, &member{g.tally, dialer}); err != nil {
				g.tally.failed(err)
			}
		}
	}
}

// config has the library's defaults (session timeout 10 s, heartbeat each 3 s, commit each 1 s) but
// for the size of a Fetch response.
func (g *Group) config(dialer *memberDialer) *sarama.Config {
	config := sarama.NewConfig()
	config.ClientID = g.clientID
	config.Consumer.Fetch.Default = g.fetchBytes
	config.Consumer.Offsets.Initial = sarama.OffsetOldest
	config.Consumer.Return.Errors = true
	config.Net.Proxy.Enable = true
	config.Net.Proxy.Dialer = dialer
	return config
}
